-- Removes a replica from locations. KEYS: location of each address. ARGV: token. Returns 1 for each address.
local theirs, replies = set_of(ARGV[1]), {}
for i = 1, #KEYS do
  local before = get(KEYS[i])
  local location = without(before, theirs)
  if location == '' then
    redis.call('DEL', KEYS[i])
  elseif location ~= before then
    redis.call('SET', KEYS[i], location, 'KEEPTTL')
  end
  replies[i] = 1
end
return replies
