"""The server: the actions of the host over a WebSocket and HTTP, the panel, and who may use them.

Needs the extra `server`. See docs/server.md.
"""

from importlib.util import find_spec

if find_spec("starlette") is None:
    raise ImportError('the server needs more packages: pip install "openjobs-git[server]"')

from .app import App, create_app
from .backend import AttachedBackend, Backend, RunnerBackend, Surroundings
from .security import Admitted, Auth, Places, TokenAuth

__all__ = [
    "Admitted",
    "App",
    "AttachedBackend",
    "Auth",
    "Backend",
    "Places",
    "RunnerBackend",
    "Surroundings",
    "TokenAuth",
    "create_app",
]
