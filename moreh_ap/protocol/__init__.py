"""What the controller and its workers say to each other: messages, and the formats inside them. Knows neither side."""
