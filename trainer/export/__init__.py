"""Files for others: whole models, LoRAs, all in one; what each says of itself, and its reading back."""
