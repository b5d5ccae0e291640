"""Dashboards, alerts and manifests. A package for `python -m deploy.render` alone; it is in no wheel."""
