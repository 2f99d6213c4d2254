"""Ready-made tasks, a folder each: environment, data loader and reward, with a README."""
