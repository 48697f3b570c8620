"""What a model's directory says without its weights, and what the model allows of a request."""
