"""Clusters: submitting runs, commanding them, manifests."""
