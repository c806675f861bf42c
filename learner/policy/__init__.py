"""The trained model: loading, packed forward, loss, gradients over ranks, and its weights under checkpoint names."""
