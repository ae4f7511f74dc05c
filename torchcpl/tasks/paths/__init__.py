"""Path prediction: lane maps, bird's-eye scenes with several valid paths, one path to select."""
