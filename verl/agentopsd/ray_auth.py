"""Ray's token: a cluster that ``ray start`` made asks for one as soon as a token file exists.

``ray start`` turns token authentication on when it finds ``~/.ray/auth_token`` (a local ``ray.init`` leaves one there);
a process that joins the cluster does not, and is refused with ``InvalidAuthToken``. Joining follows the same rule here.
"""

from __future__ import annotations

import os


def use_token_if_there() -> None:
    """Sends the token to a cluster that is about to be joined, when there is one and the user did not decide."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    try:
        from ray._private.authentication import authentication_token_setup as setup
    except ImportError:  # before Ray had tokens
        return
    setup.logger.setLevel("ERROR")
    setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
