"""Objects that nobody labelled: suggested by what a model's answers agree on, reviewed by a person, written back."""
