"""What anyone can check a DequantizePacked implementation against: exact expected values, payloads, comparison."""
