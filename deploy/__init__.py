"""Dashboards, alerts and manifests. For `python -m deploy.render` and `python -m deploy.lock` alone: in no wheel."""
