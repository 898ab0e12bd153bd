"""Groups of machines that train one model: what Ray places there, and what runs on without it."""
