"""What a run whose `measure.profile` is not off records: a trace of a few steps, and what their memory is for."""
