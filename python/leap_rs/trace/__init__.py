"""Reading, converting and describing traces."""
