"""A model of a training step: what balance of attention brings for given documents, model and cluster."""
