"""Where one replica's bytes live. Knows neither when replicas agree nor over what they talk."""
