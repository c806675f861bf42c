"""Finds objects that nobody labelled. A model's answers suggest objects, a person reviews them, and the accepted ones
are added to new annotations."""
