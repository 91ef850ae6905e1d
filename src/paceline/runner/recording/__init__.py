"""Steps as graphs: what a key is, who keeps, captures and replays them, and what may not change or
be read meanwhile."""
