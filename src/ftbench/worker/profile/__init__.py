"""Records of a run with `measure.profile`: a trace of a few steps, and their memory by purpose."""
