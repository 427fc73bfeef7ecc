"""What every layer shares: types, operator registration, exact arithmetic, memory, batch invariance."""
