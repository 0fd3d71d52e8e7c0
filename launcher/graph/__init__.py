"""The job's step as one graph of layers: captured, put in a form that can be cut, and cut into stages."""
