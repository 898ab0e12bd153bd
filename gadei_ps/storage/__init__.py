"""Files on the disk: checkpoints, histories and exported models."""
