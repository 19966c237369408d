"""Finding services that hang: they live, but their event loop makes no progress.

A service sends a heartbeat from its event loop each second (`heartbeat`). Its parent, the
supervisor of `thaw up` or the parent process of a container (`python -m shared.watchdog --
COMMAND`), receives the heartbeats, decides (`decision`), and ends a service that hangs. The
heartbeats are those of systemd's watchdog (sd_notify), which may watch a service as well. Imports
nothing outside the standard library: in a container the parent is to stay small.
"""
