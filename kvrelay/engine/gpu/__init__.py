"""The engine on a card. Nothing of it is imported where the engine runs on a CPU."""
