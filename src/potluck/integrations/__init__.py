"""Other people's trainers on a fleet: Hugging Face's and TRL's, Lightning's, Accelerate's. Each needs its library."""
