"""What is learned from an answer: the target tokens, their labels and their weights. Pure."""
