"""What is run: named shapes, loading."""
