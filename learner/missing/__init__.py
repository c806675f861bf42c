"""Finds objects that nobody labelled. A model's answers suggest them, a person reviews them, new annotations get
them."""
