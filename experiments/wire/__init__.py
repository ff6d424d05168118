"""What smaller replies do to the answer."""
