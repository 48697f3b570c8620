"""Where the trained model of the demo is: small, and no random one."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parents[1] / "demo" / "model"
