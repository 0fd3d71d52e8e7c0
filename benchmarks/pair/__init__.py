"""Two workers and what they are compared with: the same model, trained by every contestant as processes of their own."""
