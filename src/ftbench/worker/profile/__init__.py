"""What a run whose `measure.profile` is not off records beside its steps: a trace of a few of them, and their memory."""
