"""A replica: one copy of the model with its optimizer, whatever they are split over, and how it computes and steps."""
