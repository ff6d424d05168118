"""A variational autoencoder over silos that hold mostly one kind of image each."""
