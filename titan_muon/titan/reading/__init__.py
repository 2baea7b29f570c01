"""What a model's modules say of their parameters: which are matrices, which hold several, and which are none"""
