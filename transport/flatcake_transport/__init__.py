"""The ground floor both sides stand on: addresses, layout, plans and movers. Imports nothing of ours."""
