-- Checks which keys exist, without reading them. KEYS: a key of each address. Returns for each 1 if it exists, else 0.
local replies = {}
for i = 1, #KEYS do
  replies[i] = redis.call('EXISTS', KEYS[i])
end
return replies
