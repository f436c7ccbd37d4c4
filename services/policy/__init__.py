"""What operators promise: the policy file's orgs, tiers, classes and models. A library for gateway and scheduler; knows neither."""
