"""Annotations of five formats as `RawRecord`s (R41): one module per format, and one that finds out which it is.

A reader is a function of a `Source`. It returns the folder where relative image paths start, and the records, in the
file's order. Numbers may be written as 640, 640.0 or "640". An image without objects is a sample that teaches the empty
answer. `data.reader` names a function of the user's own (`learner.extensions.Reader`), for any other format.
"""
