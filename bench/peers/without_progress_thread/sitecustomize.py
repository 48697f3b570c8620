"""Loaded by every Python process that has this folder in PYTHONPATH: NIXL agents start without a progress thread."""

from nixl._api import nixl_agent_config  # type: ignore[import-not-found]

nixl_agent_config.__init__.__defaults__ = (False, *nixl_agent_config.__init__.__defaults__[1:])
