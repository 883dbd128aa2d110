"""HOW it happens: hooks turn module events into the schedule's ops, and one run loop executes them."""
