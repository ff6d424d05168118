"""NVFlare 2.9, Collab API: provisioned kits, silo processes that live as long as the run, every algorithm."""
