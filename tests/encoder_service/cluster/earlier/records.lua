-- Prelude of every script. A token of 8 bytes identifies one start of a replica. A location is a string of records, each
-- a token and the grid (height and width, 4 bytes each). All keys of a call are in one slot.
local TOKEN, RECORD = 8, 16

-- The set of tokens in a string of tokens.
local function set_of(tokens)
  local set = {}
  for i = 1, #tokens, TOKEN do
    set[string.sub(tokens, i, i + TOKEN - 1)] = true
  end
  return set
end

-- The records of a location without those of a set of tokens.
local function without(location, unwanted)
  local kept = {}
  for i = 1, #location, RECORD do
    local record = string.sub(location, i, i + RECORD - 1)
    if not unwanted[string.sub(record, 1, TOKEN)] then
      kept[#kept + 1] = record
    end
  end
  return table.concat(kept)
end

local function get(key)
  return redis.call('GET', key) or ''
end
