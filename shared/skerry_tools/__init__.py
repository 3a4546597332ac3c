"""Tools that stand outside the product: audit, chaos, plan and lab."""
