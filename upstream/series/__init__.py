"""What the series change, one folder a series, and in it one folder a commit."""
