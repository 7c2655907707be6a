"""What a run will need, before anything is trained."""
