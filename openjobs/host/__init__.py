"""Where openjobs meets its process: home, signals, ordered shutdown, the action table, the home's socket.

Import the module that is needed (`host.config`, `host.launcher`, `host.actions`, `host.client`):
this one imports nothing, so that a command starts fast.
"""
