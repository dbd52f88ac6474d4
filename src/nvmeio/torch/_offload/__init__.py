"""What training keeps on a drive: states of optimizers, and what forward passes save."""
