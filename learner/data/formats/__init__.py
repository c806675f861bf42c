"""Reads annotations of six formats as `RawRecord`s (R41). Each format has a module, and `detect` finds the format.

A reader is a function of a `Source`. The reader returns the folder where relative image paths start, and the records,
in the file's order. Numbers may be written as 640, 640.0 or "640". An image without objects is a sample whose answer
has no objects. For any other format, `data.format` names a function of the user (`learner.extensions.Reader`).
"""
