"""Commands a person types: parse first, import heavy things later."""
