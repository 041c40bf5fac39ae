-- Prelude of every script: a location is a string of records, each an 8-byte replica token and a byte of tier.
local TOKEN, RECORD = 8, 9

-- The records of a location without those of the given tokens (a string of tokens).
local function without(location, tokens)
  local ignored, kept = {}, {}
  for i = 1, #tokens, TOKEN do
    ignored[string.sub(tokens, i, i + TOKEN - 1)] = true
  end
  for i = 1, #location, RECORD do
    local record = string.sub(location, i, i + RECORD - 1)
    if not ignored[string.sub(record, 1, TOKEN)] then
      kept[#kept + 1] = record
    end
  end
  return table.concat(kept)
end

-- The keys of one call are of one slot; a call takes as many addresses as it is given keys for.
local function get(key)
  return redis.call('GET', key) or ''
end
