"""Images that are processed before training."""

from ftbench.spec.optimizations.declaration import EXACT, Optimization, Tolerance

OPTIMIZATION = Optimization(
    description="process images once, before training, and keep them on disk: steps do not wait for them",
    verified="batches take images from the disk alone",
    tolerance=Tolerance(EXACT),
    images="keeps images",
)
