"""Probes of the gateway by client libraries; each module runs in its library's environment."""
