"""What a command line says, and how a command ends."""
